"""Export to GGUF, for llama.cpp and Ollama."""
