"""Recipe: fine-tune a transformers encoder to classify texts."""
