"""Workloads driven against a real engine, open loop: nobody waits for an answer before the next request is sent."""
