"""An asynchronous run: what became of every prompt group, the log of it, its data, and the thread of the trainer."""
