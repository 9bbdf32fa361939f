"""Someone else's training script, run in this process and watched."""
