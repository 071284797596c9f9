// Package job is what the lab and its agent in the guest say to each other over a serial port: a line of JSON each.
package job

// A Job is one program to run in the guest.
type Job struct {
	Args []string `json:"args"`
	Dir  string   `json:"dir"`
	Env  []string `json:"env,omitempty"` // beside what the agent has
}

// An Event is what the agent says. The first, before any job, is Ready.
type Event struct {
	Ready  string `json:"ready,omitempty"` // the kernel's release
	Output []byte `json:"output,omitempty"`
	Done   bool   `json:"done,omitempty"`
	Error  string `json:"error,omitempty"` // of a job that is done: why it did not end with 0
}
