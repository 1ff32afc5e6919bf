"""Payloads, results and failures sealed at rest, around any store: AES-256-GCM, one data key for each tenant."""
