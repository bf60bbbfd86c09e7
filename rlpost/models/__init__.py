"""The decoder: parameters in, arrays out; no files, no clock."""
