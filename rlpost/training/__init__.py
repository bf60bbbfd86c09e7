"""State, programs, the step and the loop around them."""
