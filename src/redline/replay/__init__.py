"""Memory: what was played, kept for learning."""
