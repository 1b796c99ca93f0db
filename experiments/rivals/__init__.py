"""The zoo: models that nobody tuned for, and what they need in every way to train them (README.md)."""
