"""A transformers encoder that learns to sort texts."""
