"""Export and import models in the format of Hugging Face transformers (Qwen3 and Qwen3-MoE)."""
