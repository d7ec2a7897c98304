"""The batch, its tokenizer and where prompts come from."""

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict

__all__ = ["BatchedDataDict"]
