"""From a policy and tasks to trajectories: decoding, collecting."""
