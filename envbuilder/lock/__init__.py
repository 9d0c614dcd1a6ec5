"""Resolve an environment once, write what came out, read it back, and say what has drifted."""
