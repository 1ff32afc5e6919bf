"""One module or package for each kind of service. No leases, tenants or hub are known here."""
