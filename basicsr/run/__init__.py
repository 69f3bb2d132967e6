"""Infrastructure of a run: startup, checks, loaders, resuming, monitoring and preemption."""
