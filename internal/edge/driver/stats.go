package driver

// Stats is what the kernel accounts to the user part of a sandbox. Counters begin with its groups.
type Stats struct {
	CPU              float64 // seconds
	ThrottledPeriods int64
	Throttled        float64 // seconds
	Memory           int64   // bytes, with the page cache that was charged to it
	MemoryAnon       int64
	MemoryPeak       int64
	MemoryLimit      int64
	MemoryHits       int64 // how often the limit was run into
	OOMKills         int64
	PIDs             int64 // tasks
	PIDsLimit        int64
	PIDsHits         int64
	AetherMemory     int64
	// Unavailable names the fields, as of dsec.v1.Metrics, that this host does not account.
	Unavailable []string
}

// Traffic is what has gone through the interfaces of a slot, as its inside sees it, without the loopback.
type Traffic struct {
	RxBytes, RxPackets, TxBytes, TxPackets int64
}
