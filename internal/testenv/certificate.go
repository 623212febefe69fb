package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certificate is a private certificate authority with a certificate that it issued for 127.0.0.1 and localhost.
// Both are valid for a day, starting an hour ago.
type Certificate struct {
	// Pool contains the authority.
	Pool *x509.CertPool
	// CA, Cert and Key are paths of files that private servers can read.
	CA, Cert, Key string
}

// NewCertificate makes a Certificate. Its files are removed when the test ends.
func NewCertificate(t testing.TB) Certificate {
	t.Helper()
	dir, err := os.MkdirTemp("", "holdfast-") // t.TempDir is closed to other users
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	in := func(name string) string { return filepath.Join(dir, name) }
	c := Certificate{Pool: x509.NewCertPool(), CA: in("ca.pem"), Cert: in("cert.pem"), Key: in("key.pem")}
	if err := c.write(); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, c.CA, c.Cert, c.Key} {
		if _, err := unprivileged(path); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func (c Certificate) write() error {
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a private authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	authority, err := issue(c.CA, &template, &template, caKey, caKey)
	if err != nil {
		return err
	}
	c.Pool.AddCert(authority)

	template.SerialNumber, template.Subject.CommonName = big.NewInt(2), "a server"
	template.IsCA, template.KeyUsage = false, x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	template.DNSNames = []string{"localhost"}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if _, err = issue(c.Cert, &template, authority, key, caKey); err != nil {
		return err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(c.Key, "PRIVATE KEY", secret)
}

func issue(path string, template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, err
	}
	if err := writePEM(path, "CERTIFICATE", der); err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
