"""From logits to token ids without waiting for the host: edits, argmax, seeded draws."""
