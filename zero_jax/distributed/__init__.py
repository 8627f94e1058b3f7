"""Several processes as one run: start (`launch`, `initialize`), agree (`agreement`), end (`preemption`, `watchdog`)."""
