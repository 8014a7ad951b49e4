"""Settings and requests that are refused, as cases of docs/refusals.md: the checks themselves say why."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO, PPO = EXAMPLES / "demo" / "demo.toml", EXAMPLES / "ppo" / "ppo.toml"
SFT = EXAMPLES / "sft" / "sft.toml"
ON_POLICY = "staleness.max=0"
ONLINE_PAIRS = ("algorithm.name=online_dpo", "algorithm.shaping.filter_zero_variance=false")
FILTERED = "algorithm.shaping.filter_zero_variance=true"
OVERLONG = "algorithm.shaping.overlong=true"
ECHO = "environment.name=tests.support.environments.Echo"
TAUGHT = ("algorithm.name=opd", "roles.teacher.actor=x.Teacher")
TEACHER = "algorithm.distil.place=advantage"
WRITES = ("algorithm.name=opd", "algorithm.distil={place='loss', student_share=0.5, top_k=5}", "roles.teacher.model=x")
PLAYERS = 'environment.players=["solver", "critic"]'
SERVED = "rollout.backend=sglang"
TRACES = "data.kind=traces"
URL = 'rollout.sglang.urls=["http://127.0.0.1:1"]'
AGENT = ("agent.function=x.solve", "gateway.port=0")
EXPERTS = tuple(
    f"model.architecture.{setting}"
    for setting in ("model_type=olmoe", "num_local_experts=8", "num_experts_per_tok=2", "num_experts=8")
)
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
MIXTURE = MODEL | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Case:
    """Settings that are refused.

    Attributes:
        name: of the case.
        settings: overrides of a configuration.
        file: the configuration.
    """

    name: str
    settings: tuple[str, ...]
    file: Path = DEMO


@dataclass(frozen=True)
class Layout:
    """A section [trainer.megatron] that a model refuses."""

    name: str
    section: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: MODEL)


@dataclass(frozen=True)
class Request:
    """Fields of a request that the gateway refuses."""

    name: str
    fields: dict[str, Any]
    route: str = "/v1/chat/completions"


ALGORITHM = (
    Case("idle bound", ("algorithm.name=sapo", "algorithm.clip_high=0.5")),
    Case("idle dual clip", ("algorithm.name=cispo", "algorithm.dual_clip=3")),
    Case("idle length", ("algorithm.length=9",)),
    Case("idle coefficient", ("algorithm.kl.coefficient=0.1",)),
    Case(
        "idle bound of tis",
        ("algorithm.proximal=trainer", "algorithm.correction.kind=importance", "algorithm.correction.low=0.2"),
    ),
    Case("idle lambda", ("algorithm.gae_lambda=0.9",)),
    Case("one sample", ("rollout.group_size=1",)),
    Case("no critic", ("algorithm.advantage=gae", "algorithm.scale=none")),
    Case("no squared probabilities", ("algorithm.name=optimal_token_baseline",)),
    Case("no greedy sample", ("algorithm.name=remax", ON_POLICY, "rollout.actor=my.Rollout")),
    Case("negative rewards", ("algorithm.name=max_rl", "algorithm.shaping.overlong=true")),
    Case("whiten and scale", ("algorithm.whiten=samples",)),
    Case("reference without readers", ("algorithm.reference_every=10", "roles.reference.replicas=1")),
    Case("reference in the trainer", ("algorithm.reference_every=10", "algorithm.kl.place=loss")),
    Case("pair without a loss of pairs", ("algorithm.advantage=best_worst", "algorithm.scale=none")),
    Case("loss of pairs without a pair", ("algorithm.name=online_dpo", "algorithm.advantage=group")),
    Case("pairs by length", ("algorithm.name=online_dpo", "algorithm.aggregate=token_mean")),
    Case("imitation beside means of samples", ("algorithm.name=grpo", "algorithm.positive_nll=0.1")),
    Case("correctness of penalised rewards", ("algorithm.name=pass_at_k", OVERLONG)),
    Case("correctness of rewards by length", ("algorithm.name=pass_at_k", "algorithm.shaping.length_penalty=0.1")),
    Case(
        "correctness of rewards with a KL",
        ("algorithm.name=pass_at_k", "algorithm.kl.place=reward", "algorithm.kl.kind=k1", "roles.reference.replicas=1"),
    ),
    Case("k of a smaller group", ("algorithm.name=pass_at_k", "algorithm.pass_k=64")),
    Case(
        "imitation beside rejected samples",
        ("algorithm.positive_nll=0.1", "algorithm.proximal=trainer", "algorithm.reject.kind=geometric"),
    ),
    Case("observations of completions", ("algorithm.name=echo",)),
    Case(
        "observations beside ratios of samples",
        (ECHO, "algorithm.name=gspo", "algorithm.observation_nll=0.05", "reward.function=environment"),
    ),
    Case(
        "observations beside rejected samples",
        (
            *(ECHO, "algorithm.name=echo", "algorithm.proximal=trainer", "algorithm.reject.kind=geometric"),
            "reward.function=environment",
        ),
    ),
    Case("lambda beside a length-adaptive one", ("algorithm.name=vapo", ON_POLICY, "algorithm.gae_lambda=0.9"), PPO),
    Case("pairs that a teacher would change", (*ONLINE_PAIRS, TAUGHT[1], TEACHER)),
    Case("settings of another loss of pairs", ("algorithm.name=simpo", "algorithm.pairs.tau=0.5"), SFT),
    Case("whiten rloo", ("algorithm.advantage=rloo", "algorithm.scale=none", "algorithm.whiten=samples")),
    Case("decoupled rloo", ("algorithm.name=gdpo", "algorithm.advantage=rloo", "algorithm.whiten=none")),
    Case("one component", ("algorithm.name=gdpo", "reward.function.exact_match=1", 'reward.components=["only"]')),
    Case("unknown component", ("algorithm.name=gdpo", "algorithm.weights.style=2")),
    Case("length-weighted ratio", ("algorithm.name=gspo", "algorithm.aggregate=token_mean")),
    Case("luspo of tokens", ("algorithm.aggregate=sample_weight_length",)),
    Case("clip of no ratio", ("algorithm.name=opo", "algorithm.surrogate=clip")),
    Case("covariance without a ratio", ("algorithm.name=clip_cov", "algorithm.ratio=none")),
    Case(
        "samples whitened by tokens",
        ("algorithm.advantage=returns", "algorithm.scale=none", "algorithm.whiten=samples"),
    ),
    Case("overlong buffer", ("algorithm.name=dapo", "rollout.max_tokens=6", "algorithm.shaping.overlong_buffer=100")),
    Case("opsm of equal policies", ("algorithm.proximal=trainer", "algorithm.reject.opsm=1e-4")),
    Case("stale score", ("algorithm.name=opo",)),
    Case("score in several updates", ("algorithm.name=opo", ON_POLICY, "trainer.epochs=2")),
    Case("bound below zero", ("algorithm.clip_low=1.5",)),
    Case("k1 in the loss", ("algorithm.kl.place=loss", "algorithm.kl.kind=k1")),
    Case("KL without a reference", ("algorithm.name=reinforce_pp",)),
    Case("weight of 1", ("algorithm.correction.kind=tis",)),
    Case(
        "normalised weights inside a sample",
        (
            *("algorithm.name=vespo", "algorithm.proximal=trainer", "algorithm.correction.kind=tis"),
            "algorithm.correction.normalise=tokens",
        ),
    ),
    Case(
        "no lower bound",
        ("algorithm.proximal=trainer", "algorithm.correction.kind=icepop", "algorithm.correction.low=0"),
    ),
    Case("no teacher", ("algorithm.name=opd",)),
    Case("nothing to train", ("algorithm.advantage=none",)),
    Case("decoupled scale", ("algorithm.name=gdpo", "algorithm.scale=batch_std")),
    Case("decoupled penalty", ("algorithm.name=gdpo", "algorithm.shaping.overlong=true")),
    Case("decoupled length penalty", ("algorithm.name=gdpo", "algorithm.shaping.length_penalty=0.5")),
    Case(
        "decoupled KL",
        ("algorithm.name=gdpo", "algorithm.kl.place=reward", "algorithm.kl.kind=k1", "roles.reference.replicas=1"),
    ),
    Case("divergence of an advantage", (*TAUGHT, "algorithm.distil.kind=jsd")),
    Case("top tokens of an advantage", (*TAUGHT, "algorithm.distil.top_k=5")),
    Case("tail of nothing", (*TAUGHT, "algorithm.distil.place=loss", "algorithm.distil.tail=drop")),
    Case(
        "mixture of one",
        (*TAUGHT, "algorithm.distil.place=loss", "algorithm.distil.top_k=5", "algorithm.distil.teacher_weight=0.3"),
    ),
    Case("whitened zeros", (*TAUGHT, "algorithm.whiten=tokens")),
    Case("scaled zeros", (*TAUGHT, "algorithm.scale=batch_std")),
    Case("scaled signal of zeros", (*TAUGHT, "algorithm.signal_scale=true")),
    Case("filtered rows of a teacher", (*TAUGHT, FILTERED)),
    Case("filtered rows of a running mean", ("algorithm.name=rae", FILTERED)),
    Case("signal of every row", ("algorithm.name=remax", ON_POLICY, "algorithm.signal_scale=true")),
    Case("signal of components", ("algorithm.name=gdpo", "algorithm.signal_scale=true")),
    Case("geometric mean of tokens", ("algorithm.surrogate=geometric",)),
    Case("reversed covariances", ("algorithm.name=clip_cov", "algorithm.covariance_bounds=[5, 1]")),
    Case("correction of p3o", ("algorithm.name=p3o", "algorithm.proximal=trainer", "algorithm.correction.kind=tis")),
    Case("overlong turn", (OVERLONG, ECHO)),
    Case("overlong player", (OVERLONG, ECHO, "environment.token_budget=90", 'environment.players=["a", "b"]')),
    Case(
        "overlong buffer of an episode",
        (OVERLONG, ECHO, "environment.token_budget=90", "algorithm.shaping.overlong_buffer=91"),
    ),
    Case("overlong answer of an agent", (OVERLONG, "agent.function=x.solve")),
    Case("nucleus", ("rollout.top_p=0.9",)),
)
SAMPLES = (
    Case("credit of turns by a function", (ECHO, "environment.credit=turn", "reward.function=exact_match")),
    Case("an agent in an episode of players", (*AGENT, ECHO, PLAYERS)),
    Case("batch statistics of players", (ECHO, PLAYERS, "algorithm.scale=batch_std", "reward.function=environment")),
    Case("nobody to compare with", (ECHO, PLAYERS, 'algorithm.rivals=["solver"]', "reward.function=environment")),
    Case("rivals of another run", (ECHO, PLAYERS, 'algorithm.rivals=["a", "b"]', "reward.function=environment")),
    Case(
        "hierarchy without rivals", (ECHO, PLAYERS, "algorithm.name=hierarchical_grpo", "reward.function=environment")
    ),
    Case("components of players", (ECHO, PLAYERS, "algorithm.signal_scale=true", "reward.function=environment")),
    Case("no trained player", (ECHO, PLAYERS, "environment.trained=[]", "reward.function=environment")),
    Case("updates within on-policy rows", (ON_POLICY, "rollout.in_flight_updates=true")),
    Case("a backlog that no run has", ("rollout.spot_backlog=100",)),
    Case("any staleness without a correction", ("staleness.policy=correct",)),
)
ENGINES = (
    Case("least tokens with SGLang", (SERVED, "rollout.min_tokens=3")),
    Case("experts that SGLang names otherwise", (SERVED, URL, *EXPERTS)),
    Case("servers fewer than actors", (SERVED, URL, "rollout.replicas=2")),
    Case(
        "places fewer than samples, deterministic",
        (SERVED, "rollout.sglang.max_concurrent_samples=4", "run.deterministic=true"),
    ),
    Case("heads that ranks cannot share", (SERVED, "rollout.sglang.tensor_parallel=3")),
    Case("router replay without experts", ("trainer.router_replay=true",)),
    Case("one simulated engine", ("rollout.backend=simulated",)),
    Case("settings of another backend", ("trainer.megatron.ranks=8",)),
    Case("recomputed attention with torch", ("trainer.recompute=selective",)),
    Case("weights of few bits with Megatron-Core", ("trainer.backend=megatron", "trainer.fake_quant.bits=4")),
    Case("training in 8 bits", ("trainer.precision=fp8",)),
    Case("weights that SGLang quantises once", (SERVED, "rollout.sglang.arguments=['--quantization', 'fp8']")),
    Case("weights of four bits with SGLang", (SERVED, "rollout.sglang.quantization=int4")),
    Case("blocks that do not divide a layer", (SERVED, "rollout.sglang.quantization=fp8")),
    Case("settings of another critic", ("critic.megatron.tensor_parallel=2",), PPO),
    Case("a reference that nothing reads", ("roles.reference.replicas=1",)),
    Case("log-probs that nothing reads", ("roles.actor_fwd.replicas=1",)),
    Case("log-probs that nothing computes", ("algorithm.proximal=actor_fwd",)),
)
LAYOUTS = (
    Layout("layers of stages", {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 4}),
    Layout("stages", {"ranks": 3, "pipeline_parallel": 3}),
    Layout("layers of the last stage", {"ranks": 2, "pipeline_parallel": 2, "last_stage_layers": 4}),
    Layout("uneven virtual stages", {"ranks": 1, "first_stage_layers": 2}),
    Layout("experts of a dense model", {"ranks": 2, "expert_parallel": 2}),
    Layout("grouped experts of a dense model", {"grouped_experts": True}),
    Layout("experts without sequence parallelism", {"ranks": 2, "tensor_parallel": 2}, MIXTURE),
    Layout(
        "gradients of experts",
        {"ranks": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
        MIXTURE,
    ),
)
TEACHERS = (
    Case("a teacher that is not used", ("roles.teacher.hint='{prompt}'",)),
    Case("the policy as its own teacher", (TEACHER, "roles.teacher.replicas=1")),
    Case(
        "a served teacher at another temperature",
        (
            TEACHER,
            "roles.teacher.server=http://127.0.0.1:1",
            "rollout.temperature=0.8",
        ),
    ),
    Case("a hint that adds nothing", (TEACHER, "roles.teacher.hint='{prompt}'")),
    Case("rewards of samples of a teacher", (*WRITES, "algorithm.advantage=group")),
    Case("samples of a teacher in episodes", (*WRITES, ECHO)),
    Case("samples of a teacher of your own", (*WRITES, "roles.teacher.actor=x.Teacher")),
    Case(
        "an estimate at tokens of the teacher",
        (WRITES[0], "algorithm.distil={place='loss', student_share=0.5}", WRITES[2]),
    ),
)
REWARD_MODELS = (Case("a reward model that is not served", ("reward.function=reward_model",)),)
FROM_DATA = (
    Case("several scores of a pair", ("algorithm.name=reward_model", "algorithm.scores.classes=2"), SFT),
    Case("trained tokens of a reward model", ("algorithm.name=reward_model", "examples.train=all"), SFT),
    Case("samples in a run on examples", ("rollout.group_size=4",), SFT),
    Case("a reward in a run on examples", ("reward.function=numeric_match",), SFT),
    Case("examples in a run that samples", ("examples.train=all",)),
    Case("a reward of held-out examples", ("eval.reward=numeric_match",), SFT),
    Case("a loss of samples on examples", ("algorithm.surrogate=score",), SFT),
    Case("a correction without samples", ("algorithm.correction.kind=tis",), SFT),
    Case("pairs that weigh by length", ("algorithm.name=dpo", "algorithm.aggregate=token_mean"), SFT),
    Case("EXO without noise", ("algorithm.name=dpo", "algorithm.pairs.losses={exo_pair = 1.0}"), SFT),
    Case("recorded experts without a rollout", (*EXPERTS, "trainer.router_replay=true"), SFT),
)
RECORDED = (
    Case("an environment of recorded samples", (TRACES, "environment.name=tests.support.environments.Echo")),
    Case("held-out prompts of recorded samples", (TRACES,)),
    Case("pairs from recorded samples", (TRACES, "algorithm.name=dpo"), SFT),
    Case(
        "recorded samples beside prompts",
        ("data.kind=mixture", "data.mixture.a.kind=traces", "data.mixture.b.kind=jsonl"),
    ),
)
REQUESTS = (
    Request("a penalty", {"presence_penalty": 0.5}),
    Request("top k", {"top_k": 20}),
    Request("biased tokens", {"logit_bias": {"5": 10}}),
    Request("most likely tokens", {"logprobs": True, "top_logprobs": 3}),
    Request("functions of old", {"functions": [{"name": "f"}]}),
    Request("another format", {"response_format": {"type": "xml"}}),
    Request("a call of no tool", {"tool_choice": "required"}),
    Request("an echo", {"echo": True}, "/v1/completions"),
    Request("several prompts", {"prompt": [[1], [2]]}, "/v1/completions"),
    Request("a stored response", {"input": "x", "previous_response_id": "r"}, "/v1/responses"),
    Request("a built-in tool", {"input": "x", "tools": [{"type": "web_search"}]}, "/v1/responses"),
    Request("media as tokens", {"token_ids": [1], "features": [{}]}, "/inference/v1/generate"),
)
