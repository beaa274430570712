"""What a training can do beside learning: one file a feature, and processes that share the work."""
