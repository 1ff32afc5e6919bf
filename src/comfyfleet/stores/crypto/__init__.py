"""Encrypts payloads, results and failures at rest, around any store: AES-256-GCM, one data key per tenant."""
