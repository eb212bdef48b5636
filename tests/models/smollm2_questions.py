"""What SmolLM2 is asked where its answers on two sides are compared."""

from __future__ import annotations

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about memory.",
    "Explain paging in one sentence.",
    "List three prime numbers above 100.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "Count from 1 to 12.",
    "Tell me about the ocean 🌊 and 海.",
]
