package versions

import "testing"

func TestReadInfo(t *testing.T) {
	t.Parallel()
	for info, want := range map[string][2]string{
		"# Server\r\nredis_version:8.0.2\r\nredis_mode:standalone\r\n":                                  {"Redis", "8.0.2"},
		"# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.1\r\nos:Linux\r\n": {"Valkey", "8.1.1"},
	} {
		if product, version := readInfo(info); product != want[0] || version != want[1] {
			t.Errorf("%q is %s %s, want %v", info, product, version, want)
		}
	}
}
