"""Kinds of task, one file each: tasks, reward and environment."""
