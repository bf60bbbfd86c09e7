"""Checkers of answers, the scoring pool, and per-domain normalisation."""
