"""Export models to and import models from Hugging Face transformers (Qwen3 and Qwen3-MoE)."""
