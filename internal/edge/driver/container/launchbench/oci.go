package launchbench

import "dsec/internal/edge/policy"

func capabilities() []string { return policy.CapabilityNames(policy.CommandCapabilities()) }

func masked() []string { return policy.Masked() }

func readOnly() []string { return policy.ReadOnly() }

// seccomp is the list of allowed calls in the form of OCI, without the rules about arguments.
func seccomp() map[string]any {
	return map[string]any{
		"defaultAction": "SCMP_ACT_ERRNO", "architectures": []string{"SCMP_ARCH_X86_64"},
		"syscalls": []map[string]any{
			{"names": policy.AllowedNames(), "action": "SCMP_ACT_ALLOW"},
			{"names": []string{"clone"}, "action": "SCMP_ACT_ALLOW", "args": []map[string]any{
				{"index": 0, "value": 0x7e020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}}},
			{"names": []string{"socket"}, "action": "SCMP_ACT_ALLOW", "args": []map[string]any{{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}}},
			{"names": []string{"socket"}, "action": "SCMP_ACT_ALLOW", "args": []map[string]any{{"index": 0, "value": 2, "op": "SCMP_CMP_EQ"}}},
			{"names": []string{"socket"}, "action": "SCMP_ACT_ALLOW", "args": []map[string]any{{"index": 0, "value": 10, "op": "SCMP_CMP_EQ"}}},
			{"names": []string{"ioctl", "clone3"}, "action": "SCMP_ACT_ALLOW"},
		},
	}
}
