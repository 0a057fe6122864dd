//! The names in a peer's certificate.

use std::fmt;
use std::net::IpAddr;

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::asn1::ObjectIdentifier;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::{DirectoryString, GeneralName};

use super::{PeerIdentity, is_hidden};

/// The longest name that is reported, in bytes. This is the limit of a SPIFFE ID.
const LONGEST: usize = 2048;

/// The object identifier of a common name.
const COMMON_NAME: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.4.3");

/// A name in a peer's certificate; see [`PeerIdentity::names`]. It is displayed in the format of OpenSSL, such as `DNS:node1.example`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
// bound: handshake-bytes
pub enum PeerName {
    /// A host name in the subject alternative names. It may begin with `*.`.
    Dns(String),
    /// An IP address in the subject alternative names.
    Ip(IpAddr),
    /// A URI in the subject alternative names, such as a SPIFFE ID.
    Uri(String),
    /// A common name of the subject. If the certificate has subject alternative names, the program must not interpret the common name as a
    /// host name.
    CommonName(String),
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(host) => write!(f, "DNS:{host}"),
            Self::Ip(address) => write!(f, "IP:{address}"),
            Self::Uri(uri) => write!(f, "URI:{uri}"),
            Self::CommonName(name) => write!(f, "CN:{name}"),
        }
    }
}

impl PeerIdentity {
    /// Returns the names in the peer's own certificate: the subject alternative names in their order, then the common names. The list is
    /// empty for a raw public key, and for other kinds of identities.
    ///
    /// The authority has signed these names, but may have signed malicious ones. So some names are left out: empty names, names of more
    /// than 2,048 bytes, and names with invisible characters, such as those that control a terminal or change the direction of text. Names
    /// of other kinds are left out too. If the certificate cannot be parsed, the list is empty. If the subject alternative names cannot be
    /// parsed, only the common names are returned.
    ///
    /// Example: [the guide](crate::guide::security).
    #[must_use]
    pub fn names(&self) -> Vec<PeerName> {
        let Self::Certificates(chain) = self else { return Vec::new() };
        let Some(Ok(own)) = chain.first().map(|own| Certificate::from_der(own)) else { return Vec::new() };
        let own = own.tbs_certificate();
        let mut alternative = own.filter_extensions::<SubjectAltName>();
        // A certificate with two lists of alternative names is ambiguous, so neither list is used.
        let list = alternative.next().filter(|_| alternative.next().is_none()).and_then(Result::ok);
        let list = list.map(|(_, SubjectAltName(list))| list).unwrap_or_default();
        let common = own.subject().iter().filter(|attribute| attribute.oid == COMMON_NAME);
        let common = common.filter_map(|attribute| attribute.value.decode_as::<DirectoryString>().ok());
        let common = common.filter_map(|name| visible(&name.value()).map(PeerName::CommonName));
        list.iter().filter_map(name).chain(common).collect()
    }
}

fn name(name: &GeneralName) -> Option<PeerName> {
    match name {
        GeneralName::DnsName(host) => visible(host.as_ref()).map(PeerName::Dns),
        GeneralName::UniformResourceIdentifier(uri) => visible(uri.as_ref()).map(PeerName::Uri),
        GeneralName::IpAddress(bytes) => {
            let bytes = bytes.as_bytes();
            let address = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
            address.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok().map(PeerName::Ip)
        }
        _ => None,
    }
}

/// Returns a copy of a name. `None` if it is too long, is blank, or has invisible characters other than spaces.
fn visible(name: &str) -> Option<String> {
    let fits = !name.trim().is_empty() && name.len() <= LONGEST && !name.contains(is_hidden);
    fits.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, DnValue, KeyPair, PublicKeyData as _, SanType};

    use super::*;

    fn identity(names: Vec<SanType>, common: &[DnValue]) -> PeerIdentity {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names;
        params.distinguished_name = rcgen::DistinguishedName::new();
        for name in common {
            params.distinguished_name.push(DnType::CommonName, name.clone());
        }
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        PeerIdentity::Certificates(vec![certificate.der().to_vec(), b"another's".to_vec()])
    }

    fn dns(name: &str) -> SanType {
        SanType::DnsName(name.try_into().unwrap())
    }

    fn uri(name: &str) -> SanType {
        SanType::URI(name.try_into().unwrap())
    }

    fn shown(identity: &PeerIdentity) -> Vec<String> {
        identity.names().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_of_every_kind_are_in_the_order_of_the_certificate() {
        let names = vec![
            dns("node1.example"),
            SanType::IpAddress([192, 0, 2, 1].into()),
            SanType::Rfc822Name("who@example".try_into().unwrap()),
            uri("spiffe://example/store/7"),
            dns("*.example"),
            SanType::IpAddress([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into()),
        ];
        let identity = identity(names, &[DnValue::Utf8String("Käse 1".into())]);
        let expected = [
            "DNS:node1.example",
            "IP:192.0.2.1",
            "URI:spiffe://example/store/7",
            "DNS:*.example",
            "IP:2001:db8::1",
            "CN:Käse 1",
        ];
        assert_eq!(shown(&identity), expected);
        assert_eq!(identity.names()[0], PeerName::Dns("node1.example".into()));
    }

    #[test]
    fn common_names_of_every_encoding_are_read() {
        let printable = DnValue::PrintableString("node 1".try_into().unwrap());
        let bmp = DnValue::BmpString("Käse".try_into().unwrap());
        let teletex = DnValue::TeletexString("node2".try_into().unwrap());
        for (name, expected) in [(printable, "CN:node 1"), (bmp, "CN:Käse"), (teletex, "CN:node2")] {
            assert_eq!(shown(&identity(vec![], &[name])), [expected]);
        }
    }

    #[test]
    fn hostile_names_are_left_out() {
        let long = "x".repeat(64 << 10);
        let names = ["", " ", "good\0evil", "a\nroot logged in", "a\u{1b}[2J", "\u{7f}", &long];
        let mut list: Vec<_> = names.iter().flat_map(|name| [dns(name), uri(name)]).collect();
        list.push(dns("node1.example"));
        for common in names.iter().copied().chain(["nimda\u{202e}", "a\u{200b}b", "\u{e0041}", "a\u{2028}b"]) {
            let identity = identity(list.clone(), &[DnValue::Utf8String(common.into())]);
            assert_eq!(shown(&identity), ["DNS:node1.example"], "{common:?}");
        }
        let longest = "y".repeat(LONGEST);
        assert_eq!(identity(vec![uri(&longest)], &[]).names(), [PeerName::Uri(longest)]);
    }

    /// If a list of alternative names has a byte that is not ASCII, the list cannot be parsed.
    #[test]
    fn a_list_that_cannot_be_parsed_has_no_names() {
        let PeerIdentity::Certificates(mut chain) = identity(vec![dns("node1.example")], &["n".into()]) else {
            panic!()
        };
        let at = chain[0].windows(5).position(|part| part == b"node1").unwrap();
        chain[0][at] = 0xe4;
        assert_eq!(shown(&PeerIdentity::Certificates(chain)), ["CN:n"]);
    }

    #[test]
    fn other_identities_have_no_names() {
        let key = KeyPair::generate().unwrap().subject_public_key_info();
        for identity in [
            PeerIdentity::Anonymous,
            PeerIdentity::Psk("key".into()),
            PeerIdentity::Certificates(vec![key]),
            PeerIdentity::Certificates(vec![]),
            identity(vec![], &[]),
        ] {
            assert_eq!(identity.names(), [], "{identity:?}");
        }
    }

    proptest! {
        #[test]
        fn no_octets_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = PeerIdentity::Certificates(vec![bytes]).names();
        }

        /// Whatever byte of a certificate is changed, every reported name can be displayed safely.
        #[test]
        fn no_changed_certificate_panics_or_has_a_name_that_is_not_visible(
            at in any::<prop::sample::Index>(),
            to in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let PeerIdentity::Certificates(chain) = identity(vec![dns("a.b"), uri("c:d")], &["e".into()]) else { panic!() };
            let mut changed = chain[0].clone();
            let at = at.index(changed.len());
            changed[at] = to;
            changed.truncate(cut.index(changed.len() * 8).max(1));
            for name in PeerIdentity::Certificates(vec![changed]).names() {
                let shown = name.to_string();
                prop_assert!(!shown.chars().any(char::is_control) && shown.len() <= LONGEST + 4, "{shown:?}");
            }
        }
    }
}
