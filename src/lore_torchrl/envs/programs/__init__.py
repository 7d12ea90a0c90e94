"""Hand-written programs over each describer's ``program_fields``, for runs without a model."""
