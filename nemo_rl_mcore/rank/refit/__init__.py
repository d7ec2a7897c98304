"""Weights on their way from the training ranks into an engine, whichever it is: no Ray, no Megatron, no vLLM.

`sender` is the ranks' side; an engine's processes use the receiving ends of `transports`.
"""
