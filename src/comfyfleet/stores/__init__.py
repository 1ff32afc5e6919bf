"""Stores remember and compare; they never decide. One contract, several homes, opened by URL."""
