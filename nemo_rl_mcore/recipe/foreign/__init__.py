"""NeMo RL's keys: which of them are read under another name, and what becomes of those that are not implemented."""
