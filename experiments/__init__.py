"""Launchers: the only place that defines flags; nothing imports them."""
