"""Sending weights from the training ranks to engines of any kind: no Ray, no Megatron, no vLLM."""
