"""Exporting models to Hugging Face transformers, and importing them: folders of Qwen3 and Qwen3-MoE."""
