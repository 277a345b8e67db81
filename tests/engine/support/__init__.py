"""Starting, driving and observing a real engine; nothing here shares code with kvcatch."""
