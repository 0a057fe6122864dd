//! Tests of both kinds of handshakes, and of the channels that they return.

#![cfg(all(feature = "tls", feature = "psk"))]

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, PublicKeyData as _, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;

use super::channel::{CipherKey, SEGMENT, Sealer, Segments, TAG, segment, segments, tail};
use super::known_keys::KnownKeys;
use super::psk::Psk;
use super::tls::{Tls, TlsIdentity};
use super::{Channel, Handshake, HandshakeRole, Opener, PeerIdentity, Security, SecurityError, SecurityMode};

/// A certificate authority for tests.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Issues an identity for a host. Its certificate is valid from the first to the second of `years`.
    fn identity_in(&self, host: &str, years: (i32, i32)) -> TlsIdentity {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(years.0, 1, 1), date_time_ymd(years.1, 1, 1));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        TlsIdentity::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap()
    }

    pub(crate) fn identity(&self, host: &str) -> TlsIdentity {
        self.identity_in(host, (2000, 2100))
    }
}

fn mutual(own: &Authority, trusted: &Authority, host: &str) -> Security {
    Security::Tls(Tls::mutual(&own.identity(host), trusted.pem().as_bytes()).unwrap())
}

fn active(security: &Security, host: &str) -> Result<Box<dyn Handshake>, SecurityError> {
    security.start(HandshakeRole::Active { host: Some(host), address: [192, 0, 2, 1].into() }, b"context")
}

fn passive(security: &Security) -> Box<dyn Handshake> {
    security.start(HandshakeRole::Passive, b"context").unwrap()
}

/// The results of the two handshakes: of the active side, then of the passive side.
type Ends = [Result<(Channel, PeerIdentity), SecurityError>; 2];

/// Runs two handshakes against each other, with the bytes split into pieces of `cut` bytes. `wire` may change the bytes. Its arguments are
/// the sending side and the bytes.
fn talk(mut sides: [Box<dyn Handshake>; 2], cut: usize, mut wire: impl FnMut(usize, &mut Vec<u8>)) -> Ends {
    let mut out = [Vec::new(), Vec::new()];
    let mut errors = [None, None];
    sides[0].begin(&mut out[0]).unwrap();
    sides[1].begin(&mut out[1]).unwrap();
    assert!(out[1].is_empty(), "the active side begins");
    while out.iter().any(|bytes| !bytes.is_empty()) && errors.iter().all(Option::is_none) {
        for from in 0..2 {
            let mut bytes = std::mem::take(&mut out[from]);
            wire(from, &mut bytes);
            for piece in bytes.chunks(cut) {
                if let Err(error) = sides[1 - from].read(piece, &mut out[1 - from]) {
                    assert!(!sides[1 - from].alert(&error).is_empty());
                    errors[1 - from] = Some(error);
                    break;
                }
            }
        }
    }
    let [first, second] = &mut sides;
    let [of_first, of_second] = errors;
    let end = |side: &mut Box<dyn Handshake>, error: Option<SecurityError>| {
        let none = || SecurityError::Settings("it does not end".into());
        error.map_or_else(|| side.finish().ok_or_else(none), Err)
    };
    [end(first, of_first), end(second, of_second)]
}

fn shake(active_side: &Security, passive_side: &Security, host: &str) -> Ends {
    talk([active(active_side, host).unwrap(), passive(passive_side)], usize::MAX, |_, _| {})
}

fn why(ends: &Ends, side: usize) -> String {
    ends[side].as_ref().expect_err("no peer was to be accepted").to_string()
}

/// Returns the channels of the two sides of a connection, after a successful handshake.
fn channels(security: &Security) -> [Channel; 2] {
    shake(security, security, "node").map(|end| end.unwrap().0)
}

fn all() -> Vec<Security> {
    let authority = Authority::new("test");
    vec![mutual(&authority, &authority, "node"), Security::Psk(psk("a", 1))]
}

fn psk(name: &str, seed: u8) -> Psk {
    let mut key = [seed; 32];
    key[0] = 0xff;
    Psk::new(name, key).unwrap()
}

fn sealed(sealer: &mut Sealer, header: [u8; 8], body: &[u8]) -> Vec<u8> {
    let mut message = [&header[..], body, &[0; TAG]].concat();
    assert!(sealer.seal(&mut message, 8));
    message
}

/// The address of a host is the same in each of its forms, with and without a zone.
#[test]
fn a_host_is_known_by_its_ipv4_address_in_ipv6_form() {
    let authority = Authority::new("test");
    let tls = mutual(&authority, &authority, "192.0.2.1");
    for (address, fits) in [("192.0.2.1", true), ("::ffff:192.0.2.1", true), ("::ffff:192.0.2.2", false)] {
        let role = HandshakeRole::Active { host: None, address: address.parse().unwrap() };
        let ends = talk([tls.start(role, b"context").unwrap(), passive(&tls)], usize::MAX, |_, _| {});
        assert_eq!(ends[0].is_ok(), fits, "{address}");
        // The same address as the name of a host, and as the name that the settings require.
        assert_eq!(shake(&tls, &tls, address)[0].is_ok(), fits, "{address} as a host");
        let named = Tls::mutual(&authority.identity("192.0.2.1"), authority.pem().as_bytes()).unwrap();
        let named = Security::Tls(named.server_name(address).unwrap());
        assert_eq!(shake(&named, &tls, "node")[0].is_ok(), fits, "{address} as the required name");
    }
    let tls = mutual(&authority, &authority, "fe80::1");
    for (host, fits) in [("fe80::1", true), ("fe80::1%eth0", true), ("fe80::2%eth0", false)] {
        assert_eq!(shake(&tls, &tls, host)[0].is_ok(), fits, "{host}");
    }
    assert!(matches!(active(&tls, "192.0.2.1%eth0"), Err(SecurityError::Settings(_))), "IPv4 addresses have no zone");
}

#[test]
fn both_sides_learn_who_the_other_is_however_the_octets_are_cut() {
    for security in all() {
        for cut in [1, 2, 17, 1000, usize::MAX] {
            let ends = talk([active(&security, "node").unwrap(), passive(&security)], cut, |_, _| {});
            for end in ends {
                match (end.unwrap().1, security.mode()) {
                    (PeerIdentity::Certificates(chain), SecurityMode::Tls) => assert_eq!(chain.len(), 1),
                    (PeerIdentity::Psk(name), SecurityMode::Psk) => assert_eq!(name, "a"),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn a_peer_of_another_authority_is_not_accepted() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let (us, them) = (mutual(&ours, &ours, "node"), mutual(&theirs, &ours, "node"));
    let ends = shake(&us, &them, "node");
    assert!(why(&ends, 0).contains("UnknownIssuer"), "{ends:?}");
    let ends = shake(&them, &us, "node");
    assert!(why(&ends, 1).contains("UnknownIssuer"), "{ends:?}");
}

#[test]
fn a_wrong_name_no_certificate_and_an_expired_one_are_not_accepted() {
    let authority = Authority::new("ours");
    let pem = authority.pem();
    let us = mutual(&authority, &authority, "node");
    let ends = shake(&us, &us, "other");
    assert!(why(&ends, 0).contains("not valid for name"), "{ends:?}");

    let anonymous = Security::Tls(Tls::client(pem.as_bytes()).unwrap());
    let ends = shake(&anonymous, &us, "node");
    assert!(why(&ends, 1).contains("no certificates"), "{ends:?}");

    let expired = authority.identity_in("node", (2000, 2001));
    let expired = Security::Tls(Tls::mutual(&expired, pem.as_bytes()).unwrap());
    assert!(why(&shake(&us, &expired, "node"), 0).contains("expired"));
    assert!(why(&shake(&expired, &us, "node"), 1).contains("expired"));
}

#[test]
fn a_side_may_stay_anonymous_if_the_other_lets_it() {
    let authority = Authority::new("ours");
    let client = Security::Tls(Tls::client(authority.pem().as_bytes()).unwrap());
    let server = Security::Tls(Tls::server(&authority.identity("node")).unwrap());
    let [of_client, of_server] = shake(&client, &server, "node").map(|end| end.unwrap().1);
    assert!(matches!(of_client, PeerIdentity::Certificates(_)));
    assert_eq!(of_server, PeerIdentity::Anonymous);
    assert!(client.check(false).is_err() && server.check(true).is_err(), "they are for one role");
    assert!(active(&server, "node").is_err());
}

#[test]
fn an_identity_is_replaced_for_the_handshakes_that_follow() {
    let authority = Authority::new("ours");
    let identity = authority.identity_in("node", (2000, 2001));
    let us = Security::Tls(Tls::mutual(&identity, authority.pem().as_bytes()).unwrap());
    assert!(shake(&us, &us, "node")[0].is_err());
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["node".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority.0).unwrap();
    let other = KeyPair::generate().unwrap().serialize_pem();
    assert!(identity.replace(certificate.pem().as_bytes(), other.as_bytes()).is_err(), "a key of something else");
    identity.replace(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap();
    assert!(shake(&us, &us, "node").iter().all(Result::is_ok));
}

/// Two sides use key pairs without certificates. The connection comes up only if each side accepts the key of the other.
#[test]
fn raw_public_keys_stand_for_certificates() {
    let [ours, theirs, other] = [0; 3].map(|_| KeyPair::generate().unwrap());
    let tls = |own: &KeyPair, known: &[&KeyPair]| {
        let known: String = known.iter().map(|key| key.public_key_pem()).collect();
        let identity = TlsIdentity::raw(own.serialize_pem().as_bytes()).unwrap();
        Security::Tls(Tls::public_keys(&identity, known.as_bytes()).unwrap())
    };
    let ends = shake(&tls(&ours, &[&other, &theirs]), &tls(&theirs, &[&ours]), "any.name.at.all");
    for (end, key) in ends.iter().zip([&theirs, &ours]) {
        let identity = &end.as_ref().unwrap().1;
        assert_eq!(*identity, PeerIdentity::Certificates(vec![key.subject_public_key_info()]));
    }
    for (active_side, passive_side, refuses) in
        [(tls(&ours, &[&other]), tls(&theirs, &[&ours]), 0), (tls(&ours, &[&theirs]), tls(&theirs, &[&other]), 1)]
    {
        let ends = shake(&active_side, &passive_side, "node");
        assert!(why(&ends, refuses).contains("not among those that are known"), "{ends:?}");
    }
    // A public key is no secret. So a peer that presents an accepted public key, and does not have the private key, must be refused.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let own = PrivateKeyDer::try_from(other.serialize_der()).unwrap();
    let own = provider.key_provider.load_private_key(own).unwrap();
    let shown = CertifiedKey::new(vec![CertificateDer::from(theirs.subject_public_key_info())], own);
    let lets_in =
        KnownKeys::new(vec![ours.subject_public_key_info().into()], provider.signature_verification_algorithms);
    let pretender = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(Arc::new(lets_in))
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(shown))));
    let ends = shake(&tls(&ours, &[&theirs]), &Security::Tls(Tls::from_rustls(None, Some(pretender))), "node");
    assert!(why(&ends, 0).contains("ignature"), "{ends:?}");
    // Certificates and raw keys are not mistaken for each other.
    let authority = Authority::new("ours");
    for ends in [
        shake(&tls(&ours, &[&theirs]), &mutual(&authority, &authority, "node"), "node"),
        shake(&mutual(&authority, &authority, "node"), &tls(&theirs, &[&ours]), "node"),
    ] {
        assert!(ends.iter().all(Result::is_err), "{ends:?}");
    }
    let raw = TlsIdentity::raw(ours.serialize_pem().as_bytes()).unwrap();
    assert_eq!(raw.end_entity(), ours.subject_public_key_info());
    raw.replace(b"", theirs.serialize_pem().as_bytes()).unwrap();
    assert_eq!(raw.end_entity(), theirs.subject_public_key_info());
    for (refused, cure) in [
        (raw.replace(authority.pem().as_bytes(), theirs.serialize_pem().as_bytes()), "no certificates"),
        (Tls::mutual(&raw, authority.pem().as_bytes()).map(drop), "use Tls::public_keys"),
        (Tls::server(&raw).map(drop), "use Tls::public_keys"),
        (Tls::public_keys(&raw, b"nothing").map(drop), "no PUBLIC KEY"),
        (
            Tls::public_keys(&authority.identity("node"), theirs.public_key_pem().as_bytes()).map(drop),
            "use TlsIdentity::raw",
        ),
        (TlsIdentity::raw(b"nothing").map(drop), "private key"),
    ] {
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(cure), "{text}");
    }
}

/// The settings of rustls may contain a different clock. The time of that clock decides if a certificate is valid.
#[test]
fn settings_of_rustls_s_own_are_taken() {
    #[derive(Debug)]
    struct At(u64);
    impl TimeProvider for At {
        fn current_time(&self) -> Option<UnixTime> {
            Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0)))
        }
    }
    let authority = Authority::new("ours");
    let of_2000 = authority.identity_in("node", (2000, 2001));
    let server = Security::Tls(Tls::server(&of_2000).unwrap());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.0.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    for (now, accepted) in [(946_700_000, true), (996_700_000, false)] {
        let config = rustls::ClientConfig::builder_with_details(Arc::clone(&provider), Arc::new(At(now)))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        let client = Security::Tls(Tls::from_rustls(Some(config), None));
        assert_eq!(shake(&client, &server, "node")[0].is_ok(), accepted, "at {now}");
    }
}

#[test]
fn keys_are_told_apart() {
    let [ours, same_name] = [psk("a", 1), psk("a", 2)].map(Security::Psk);
    for (active_side, passive_side) in [(&ours, &same_name), (&same_name, &ours)] {
        let ends = shake(active_side, passive_side, "node");
        assert!(why(&ends, 1).contains("keys differ"), "{ends:?}");
    }
    let ends = shake(&Security::Psk(psk("b", 1)), &ours, "node");
    assert!(why(&ends, 1).contains("no pre-shared key here has the name"), "{ends:?}");

    // While a key is being replaced, a member has two keys. It accepts both from peers, and uses the first one to connect.
    let digits = "ff".to_owned() + &"01".repeat(31);
    let both = Psk::parse(&format!("# two keys\n\nnew: {}\na:{digits}\n", "0f1e".repeat(16))).unwrap();
    let both = Security::Psk(both);
    assert_eq!(shake(&ours, &both, "node")[1].as_ref().unwrap().1, PeerIdentity::Psk("a".into()));
    assert!(shake(&both, &ours, "node")[1].is_err());
    assert!(!format!("{both:?}").contains("0f1e") && !format!("{both:?}").contains("15, 30"), "{both:?}");
}

#[test]
fn keys_that_cannot_be_used_are_named() {
    for (text, wrong) in [
        ("", "no pre-shared key"),
        ("a", "line 1"),
        ("a:0", "line 1"),
        ("\nb:zz", "line 2"),
        (&format!(":{}", "0f".repeat(32)), "0 bytes"),
        (&format!("{}:{}1e", "n".repeat(65), "0f".repeat(31)), "65 bytes"),
        (&format!("a:{}", "0f".repeat(32)), "equal bytes"),
        (&format!("a:{}", "+f".repeat(32)), "line 1"),
        (&format!("a:{}\nb:{}\na:{}", "0f1e".repeat(16), "1e0f".repeat(16), "0f1d".repeat(16)), "the same name"),
    ] {
        let error = Psk::parse(text).unwrap_err().to_string();
        assert!(error.contains(wrong), "{text:?}: {error}");
    }
}

#[test]
fn another_context_fails_the_handshake() {
    for security in all() {
        let other = security.start(HandshakeRole::Passive, b"another context").unwrap();
        let ends = talk([active(&security, "node").unwrap(), other], usize::MAX, |_, _| {});
        assert!(ends.iter().any(Result::is_err), "{ends:?}");
        assert!(ends[1].is_err(), "the passive side lets nobody in: {ends:?}");
    }
}

/// If any single byte of the handshake is changed, in either direction, the handshake fails. This includes the last byte.
#[test]
fn no_handshake_survives_a_changed_octet() {
    for security in all() {
        let mut lens = [0, 0];
        let sides = [active(&security, "node").unwrap(), passive(&security)];
        let ends = talk(sides, usize::MAX, |from, bytes| lens[from] += bytes.len());
        assert!(ends.iter().all(Result::is_ok));
        for (from, len) in lens.into_iter().enumerate() {
            // The length of an ECDSA signature in TLS varies by a few bytes from one handshake to the next. So the last 12 bytes of the
            // handshake are not changed here, because they may not exist.
            for at in (0..len - 12).step_by(if security.mode() == SecurityMode::Tls { 13 } else { 1 }) {
                let mut seen = 0;
                let ends = talk([active(&security, "node").unwrap(), passive(&security)], usize::MAX, |of, bytes| {
                    if of == from && (seen..seen + bytes.len()).contains(&at) {
                        bytes[at - seen] ^= 1 << (at % 8);
                    }
                    seen += if of == from { bytes.len() } else { 0 };
                });
                assert!(ends.iter().any(Result::is_err), "byte {at} from side {from}: {ends:?}");
                assert!(ends[1].is_err() || from == 1, "the passive side lets nobody in: byte {at}");
            }
        }
    }
}

#[test]
fn a_recorded_handshake_opens_nothing() {
    for security in all() {
        let mut recorded = Vec::new();
        let sides = [active(&security, "node").unwrap(), passive(&security)];
        let ends = talk(sides, usize::MAX, |from, bytes| {
            if from == 0 {
                recorded.extend_from_slice(bytes)
            }
        });
        assert!(ends.iter().all(Result::is_ok));
        let mut again = passive(&security);
        let read = again.read(&recorded, &mut Vec::new());
        assert!(read.is_err() && again.finish().is_none());
    }
}

/// A peer that has not proven its identity sends 64 KiB of empty records, or of records with one byte. The handshake ends with an error at
/// the first empty record, or at the first record beyond the limit.
#[test]
fn a_handshake_in_crumbs_is_refused() {
    let empty = vec![0; 64 << 10];
    // The beginning of a ClientHello of 65,535 bytes.
    let hello = [1, 0, 255, 255].into_iter().chain(std::iter::repeat(3));
    let crumbs: Vec<u8> = hello.take(21_845).flat_map(|octet| [1, 0, octet]).collect();
    for security in all() {
        for (bytes, piece) in [(&empty, 64 << 10), (&empty, 1), (&crumbs, 64 << 10), (&crumbs, 3)] {
            let mut side = passive(&security);
            let refused = bytes.chunks(piece).position(|part| side.read(part, &mut Vec::new()).is_err());
            let most = if piece <= 3 { 64 } else { 0 };
            assert!(refused.is_some_and(|nth| nth <= most), "{:?}: {refused:?}", security.mode());
        }
    }
}

#[test]
fn messages_open_in_their_order_and_no_other() {
    for security in all() {
        let [mut a, mut b] = channels(&security);
        let header = [7; 8];
        let messages: Vec<Vec<u8>> = (0..4_u8).map(|n| sealed(&mut a.sealer, header, &[n; 30])).collect();
        assert_ne!(messages[0][8..], messages[1][8..], "the same nonce twice");
        let mut first = messages[0].clone();
        assert_eq!(b.opener.open(&mut first, 8), Some(38));
        assert_eq!(first[..38], [&header[..], &[0; 30]].concat());
        for wrong in [0, 2] {
            // Message 0 is not opened again, and message 2 is not opened before message 1. A failure ends a connection, so each attempt
            // uses new channels.
            let [mut c, mut d] = channels(&security);
            let messages: Vec<Vec<u8>> = (0..4_u8).map(|n| sealed(&mut c.sealer, header, &[n; 30])).collect();
            assert!(d.opener.open(&mut messages[0].clone(), 8).is_some());
            assert!(d.opener.open(&mut messages[wrong].clone(), 8).is_none(), "message {wrong}");
        }
        // A message that was encrypted for the other direction is not opened, and neither is a message of another connection.
        let mut own = sealed(&mut a.sealer, header, b"x");
        assert!(a.opener.open(&mut own, 8).is_none());
        let [_, mut other] = channels(&security);
        assert!(other.opener.open(&mut messages[0].clone(), 8).is_none());
    }
}

#[test]
fn no_bit_of_a_message_can_be_changed_and_no_octet_is_missing() {
    for security in all() {
        // If a message cannot be opened, its connection ends. So each attempt uses a new channel.
        let fails = |change: &dyn Fn(&mut Vec<u8>)| {
            let [mut a, mut b] = channels(&security);
            let mut message = sealed(&mut a.sealer, [0, 0, 0, 0, 9, 0, 0, 0], b"hello");
            change(&mut message);
            b.opener.open(&mut message, 8).is_none()
        };
        for bit in 0..(8 + 5 + TAG) * 8 {
            assert!(fails(&|message| message[bit / 8] ^= 1 << (bit % 8)), "bit {bit}");
        }
        for len in 0..8 + 5 + TAG {
            assert!(fails(&|message| message.truncate(len)), "{len} bytes of it");
        }
        assert!(fails(&|message| message.push(0)) && !fails(&|_| {}));
    }
}

/// Encrypts a large message. Returns it in the layout of the memory that the peer reads: the segments, then their tags.
fn sealed_large(sealer: &mut Sealer, plain: &[u8]) -> Vec<u8> {
    let len = plain.len() as u64;
    let mut memory = plain.to_vec();
    memory.resize((len + tail(len)) as usize, 0);
    let message = sealer.begin(len);
    for index in 0..segments(len) {
        let tag = sealer.seal_segment(message, index, &mut memory[segment(index, len)]).unwrap();
        memory[len as usize + index as usize * TAG..][..TAG].copy_from_slice(&tag);
    }
    memory
}

fn opened_large(opener: &mut Opener, memory: &mut [u8], len: u64) -> bool {
    let message = opener.begin(len);
    opened_begun(opener, message, memory, len)
}

/// Decrypts a large message that was begun before.
fn opened_begun(opener: &mut Opener, message: Segments, memory: &mut [u8], len: u64) -> bool {
    (0..segments(len)).rev().all(|index| {
        let tag = memory[len as usize + index as usize * TAG..][..TAG].try_into().unwrap();
        let range = segment(index, len);
        opener.open_segment(message, index, &mut memory[range.start..range.end + TAG], tag)
    })
}

#[test]
fn large_messages_open_in_place_from_their_end() {
    for security in all() {
        let [mut a, mut b] = channels(&security);
        for len in [1, 15, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT + 5] {
            let plain: Vec<u8> = (0..len).map(|at| (at * 31 + (at >> 8)) as u8).collect();
            let mut memory = sealed_large(&mut a.sealer, &plain);
            // The encrypted form of a single byte is the same byte with a probability of 1/256.
            assert!(len == 1 || memory[..len] != plain, "{len} bytes");
            // Ordinary messages that are encrypted between two large messages use the other sequence, with separate numbers and a separate
            // key.
            let mut small = sealed(&mut a.sealer, [0; 8], b"small");
            assert!(b.opener.open(&mut small, 8).is_some());
            assert!(opened_large(&mut b.opener, &mut memory, len as u64), "{len} bytes");
            assert_eq!(memory[..len], plain);
        }
        let plain = vec![3; 2 * SEGMENT];
        let mut memory = sealed_large(&mut a.sealer, &plain);
        memory.copy_within(..SEGMENT, SEGMENT);
        assert!(!opened_large(&mut b.opener, &mut memory, plain.len() as u64), "a segment in the place of another");
    }
}

#[test]
fn keys_are_renewed_by_both_sides_at_the_same_place() {
    for security in all() {
        let [mut a, mut b] = channels(&security);
        let plain = vec![9; 1000];
        let before = sealed_large(&mut a.sealer, &plain);
        assert!(opened_large(&mut b.opener, &mut before.clone(), 1000));
        for round in 0..3 {
            // On both sides, `begin` counts the work for a message of 64 GiB. This is enough for a renewal of the key.
            let (of_a, of_b) = (a.sealer.begin(1 << 36), b.opener.begin(1 << 36));
            let _ = (of_a, of_b);
            let memory = sealed_large(&mut a.sealer, &plain);
            assert!(opened_large(&mut b.opener, &mut memory.clone(), 1000), "round {round}");
        }
        // One side counts enough work for another renewal, and the other side does not. The keys then differ, so nothing can be decrypted.
        let _ = a.sealer.begin(1 << 36);
        let memory = sealed_large(&mut a.sealer, &plain);
        let _ = b.opener.begin(1);
        assert!(!opened_large(&mut b.opener, &mut memory.clone(), 1000));
    }
}

/// A receiver begins every large message that the peer offers, and does not decrypt those that it
/// refuses. The other messages are decrypted with the keys and the numbers of their positions, also
/// if a refused message requires another key while an earlier message is still being fetched.
#[test]
fn refused_large_messages_leave_the_others_whole() {
    for security in all() {
        let [mut a, mut b] = channels(&security);
        let plain: Vec<u8> = (0..SEGMENT + 9).map(|at| at as u8).collect();
        let len = plain.len() as u64;
        let mut first = sealed_large(&mut a.sealer, &plain);
        let mut second = sealed_large(&mut a.sealer, &plain);
        // A message of 64 GiB requires a renewal of the key before it and after it.
        let _ = a.sealer.begin(1 << 36);
        let mut last = sealed_large(&mut a.sealer, &plain);
        let [of_first, _, _, of_last] = [len, len, 1 << 36, len].map(|len| b.opener.begin(len));
        assert!(opened_begun(&mut b.opener, of_first, &mut first, len));
        assert!(!opened_begun(&mut b.opener, of_first, &mut second, len), "a message in the place of another");
        assert!(opened_begun(&mut b.opener, of_last, &mut last, len));
        assert_eq!((&first[..plain.len()], &last[..plain.len()]), (&plain[..], &plain[..]));
    }
}

/// A tool can decrypt a connection with nothing but the key log of the connection. The tool derives the keys in the same way as for QUIC
/// (RFC 9001, section 5.1).
#[test]
fn a_logged_secret_opens_messages() {
    use std::sync::Mutex;

    use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    use ring::hkdf::{HKDF_SHA256, KeyType, Prk};

    #[derive(Debug, Default)]
    struct Logged(Mutex<Vec<(String, Vec<u8>)>>);
    impl rustls::KeyLog for Logged {
        fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
            self.0.lock().unwrap().push((label.into(), secret.into()));
        }
    }
    struct Length(usize);
    impl KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    let expand = |secret: &[u8], label: &str, len: usize| {
        let info = [&[0, len as u8, label.len() as u8 + 6][..], b"tls13 ", label.as_bytes(), &[0]].concat();
        let (prk, mut out) = (Prk::new_less_safe(HKDF_SHA256, secret), vec![0; len]);
        prk.expand(&[&info], Length(len)).unwrap().fill(&mut out).unwrap();
        out
    };

    let (authority, logged) = (Authority::new("ours"), Arc::new(Logged::default()));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.0.der().clone()).unwrap();
    let provider = rustls::crypto::CryptoProvider {
        cipher_suites: vec![rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..rustls::crypto::ring::default_provider()
    };
    let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.key_log = Arc::clone(&logged) as _;
    let server = Security::Tls(Tls::server(&authority.identity("node")).unwrap());
    let [client, _] = shake(&Security::Tls(Tls::from_rustls(Some(config), None)), &server, "node");
    let mut message = sealed(&mut client.unwrap().0.sealer, [7; 8], b"read along");

    let logged = logged.0.lock().unwrap();
    let labels: Vec<_> = logged.iter().map(|(label, _)| label.as_str()).collect();
    for label in ["CLIENT_HANDSHAKE_TRAFFIC_SECRET", "SERVER_HANDSHAKE_TRAFFIC_SECRET", "SERVER_TRAFFIC_SECRET_0"] {
        assert!(labels.contains(&label), "{labels:?}");
    }
    let (_, secret) = logged.iter().find(|(label, _)| label == "CLIENT_TRAFFIC_SECRET_0").unwrap();
    let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &expand(secret, "quic key", 16)).unwrap());
    // The first message has number 0, which does not change the nonce.
    let nonce = Nonce::try_assume_unique_for_key(&expand(secret, "quic iv", 12)).unwrap();
    let (header, body) = message.split_at_mut(8);
    assert_eq!(key.open_in_place(nonce, Aad::from(&*header), body).unwrap(), b"read along");
}

/// A test key records the numbers that are used with it. Each number must be used only once with the same key.
#[test]
fn a_number_is_used_once_with_a_key() {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    #[derive(Clone)]
    struct Noted {
        number_of_key: u32,
        used: Arc<Mutex<BTreeSet<(u32, u64)>>>,
    }
    impl CipherKey for Noted {
        fn seal(&self, number: u64, _: &[u8], _: &mut [u8]) -> Option<[u8; TAG]> {
            assert!(self.used.lock().unwrap().insert((self.number_of_key, number)), "a number twice");
            Some([0; TAG])
        }
        fn open(&self, _: u64, _: &[u8], _: &mut [u8]) -> bool {
            true
        }
        fn renew(&mut self) {
            self.number_of_key += 1;
        }
    }
    let first = Noted { number_of_key: 0, used: Arc::default() };
    let used = Arc::clone(&first.used);
    let mut sealer = Sealer::new(Box::new(first.clone()), Box::new(Noted { number_of_key: 1, ..first }));
    for _ in 0..9 {
        let message = sealer.begin(1 << 37);
        for index in 0..3 {
            assert!(sealer.seal_segment(message, index, &mut []).is_some());
        }
        for _ in 0..1000 {
            assert!(sealer.seal(&mut [0; 8 + TAG], 8));
        }
    }
    assert_eq!(used.lock().unwrap().len(), 9 * 1003);
    assert!(used.lock().unwrap().iter().any(|&(key, _)| key >= 15), "keys are renewed");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 256 }))]

    /// A peer sends random bytes, alone or after a valid beginning of a handshake. Nothing panics, and the peer is not accepted.
    #[test]
    fn no_octets_panic_or_let_anybody_in(
        kind in 0..2_usize,
        is_active: bool,
        good in 0..600_usize,
        noise in proptest::collection::vec(any::<u8>(), 1..300),
        cut in 1..400_usize,
    ) {
        let security = &all()[kind];
        let mut side = if is_active { active(security, "node").unwrap() } else { passive(security) };
        let mut out = Vec::new();
        side.begin(&mut out).unwrap();
        // The beginning of an honest peer's handshake.
        let mut honest = if is_active { passive(security) } else { active(security, "node").unwrap() };
        let mut said = Vec::new();
        honest.begin(&mut said).unwrap();
        let _ = honest.read(&out, &mut said);
        let whole = said.clone();
        said.truncate(good.min(said.len().saturating_sub(1)));
        said.extend_from_slice(&noise);
        // If only the last byte is missing, the noise is that byte with a probability of 1/256.
        prop_assume!(!said.starts_with(&whole));
        for piece in said.chunks(cut) {
            if side.read(piece, &mut out).is_err() {
                break;
            }
        }
        prop_assert!(side.finish().is_none());
    }

    #[test]
    fn no_message_of_a_stranger_opens(noise in proptest::collection::vec(any::<u8>(), 0..200), kind in 0..2_usize) {
        let [mut a, _] = channels(&all()[kind]);
        let mut noise = noise;
        prop_assert_eq!(a.opener.open(&mut noise, 8), None);
    }
}
