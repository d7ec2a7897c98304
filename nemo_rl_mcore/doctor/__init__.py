"""What a machine has for runs, what each missing part would enable, and the command that mends it."""
