"""The engine in a process of its own: the two ends (`child` and `client` here, `process` and `commands` there), the
messages between them (`wire`), and what keeps one running (`supervisor`, `watchdog`, `control_state`)."""
