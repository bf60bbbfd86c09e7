"""What a run would need of TPUs that are not here: memory, traffic, time."""
