"""Failover: resuming on one replica an answer that began on another."""
