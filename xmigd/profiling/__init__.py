"""What servers say of the device's work: profiles, which are always made, and traces, when somebody requests one."""
