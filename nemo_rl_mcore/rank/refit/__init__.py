"""Send weights from the training ranks to any kind of engine, without importing Ray, Megatron or vLLM."""
