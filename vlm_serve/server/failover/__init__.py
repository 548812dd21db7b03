"""Failover: continuing an answer on another replica."""
