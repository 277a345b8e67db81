"""Pure decisions on KV blocks, shared by scheduler, gateway and simulator: no engine, no I/O."""
