"""SGLang's multimodal models as rollouts need them, imported in the server's processes.

SGLang reads this package by the variable SGLANG_EXTERNAL_MODEL_PACKAGE. Each class replaces the one of the same name.
"""
