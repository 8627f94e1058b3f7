"""The commands `plan` and `inspect`: `plan_config` (their options), `plan_command`, `plan_report` (what they print)."""
