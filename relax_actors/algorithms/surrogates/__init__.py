"""Policy losses by family; `algorithm.surrogate` names one of them or your own function."""
