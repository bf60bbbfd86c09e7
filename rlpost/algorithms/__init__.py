"""What turns outcomes into gradients: pure functions, one choice a file.

`advantages`, `overlong` and `dynamic_sampling` work on the host with NumPy,
between programs; the others are traced. `recipes` names the combinations.
"""
