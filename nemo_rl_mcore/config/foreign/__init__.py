"""NeMo RL's keys: which this package reads under another name, and what it makes of those that it does not implement."""
