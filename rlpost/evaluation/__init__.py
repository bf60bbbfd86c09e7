"""Held-out results with intervals, and the reports that show them."""
