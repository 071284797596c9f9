package iam

// A Role is what a key may do within its project.
type Role string

// Roles of keys.
const (
	RoleAdmin  Role = "admin"
	RoleUser   Role = "user"
	RoleReader Role = "reader" // dashboards and audits: looks, changes nothing
)

// A Permission is what a route needs.
type Permission uint8

// Permissions.
const (
	Read    Permission = iota + 1 // see sandboxes, commands, files and environments
	Use                           // create, delete and use sandboxes
	Publish                       // import environments and remove their names
	Operate                       // change what all projects have; in the root project only
)

var allowed = map[Role]map[Permission]bool{
	RoleAdmin:  {Read: true, Use: true, Publish: true, Operate: true},
	RoleUser:   {Read: true, Use: true, Publish: true},
	RoleReader: {Read: true},
}

// Valid reports whether r is one of the roles.
func (r Role) Valid() bool { return allowed[r] != nil }

// May reports whether r has p. An unknown role has nothing.
func (r Role) May(p Permission) bool { return allowed[r][p] }

// May reports whether who the key belongs to has p, by role and project.
func (i Identity) May(p Permission) bool {
	return i.Role.May(p) && (p != Operate || i.Project == RootProject)
}
