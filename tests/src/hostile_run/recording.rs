//! Records the bytes that an honest client sends while it connects. Attackers send a part of them again.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use rdma_transport_embedded::iwarp::wire::mpa::fpdu_len;

use super::Result;
use super::credentials::Credentials;
use super::newcomers::{self, Settings};

/// The time limit of the recorded client.
const PATIENCE: Duration = Duration::from_secs(60);
/// The length of an MPA request or reply without private data, in bytes.
pub const MPA_HEADER: usize = 20;

/// The bytes that an honest client has sent.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The MPA request. Its private data is the greeting.
    pub request: Vec<u8>,
    /// The FPDUs that the client has sent after the MPA reply, until it had its echo. The first FPDU is that of MPA's peer-to-peer mode.
    /// The second FPDU is the hello or the first part of the security handshake.
    pub frames: Vec<Vec<u8>>,
}

/// Returns the length of the MPA request or reply that begins with the bytes `octets`. Returns `None` if `octets` has too few bytes.
#[must_use]
pub fn startup_len(octets: &[u8]) -> Option<usize> {
    let len = octets.get(18..MPA_HEADER)?;
    Some(MPA_HEADER + usize::from(u16::from_be_bytes([len[0], len[1]])))
}

impl Recording {
    /// Connects an honest client to the server through a relay, which records the client's bytes.
    ///
    /// # Errors
    /// The client cannot connect.
    pub fn of(server: SocketAddr, credentials: &Credentials) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let relay = listener.local_addr()?;
        let settings = Settings {
            server: relay,
            credentials: credentials.clone(),
            count: 1,
            every: Duration::ZERO,
            at_once: 1,
            patience: PATIENCE,
            within_host: false,
        };
        let (octets, up) = thread::scope(|scope| {
            let kept = scope.spawn(|| relayed(&listener, server));
            let up = newcomers::run(settings).map(|outcome| outcome.up()).map_err(|error| error.to_string());
            kept.join().map(|octets| (octets, up)).map_err(|_| "the relay panicked")
        })?;
        match up? {
            1 => Self::parse(&octets?).ok_or_else(|| "what the client sent is no connection of MPA".into()),
            _ => Err("a client does not connect before the attack".into()),
        }
    }

    fn parse(octets: &[u8]) -> Option<Self> {
        let (request, mut rest) = octets.split_at_checked(startup_len(octets)?)?;
        let mut frames = Vec::new();
        while let Some(len) = rest.first_chunk() {
            let (frame, behind) = rest.split_at_checked(fpdu_len(usize::from(u16::from_be_bytes(*len))))?;
            frames.push(frame.to_vec());
            rest = behind;
        }
        Some(Self { request: request.to_vec(), frames })
    }
}

/// Accepts one connection and relays it in both directions until both directions have ended. Returns the bytes that the client has sent.
fn relayed(listener: &TcpListener, server: SocketAddr) -> io::Result<Vec<u8>> {
    let (client, _) = listener.accept()?;
    let server = TcpStream::connect(server)?;
    thread::scope(|scope| {
        let back = scope.spawn(|| copied(&server, &client));
        let sent = copied(&client, &server);
        let _ = back.join();
        sent
    })
}

fn copied(mut from: &TcpStream, mut to: &TcpStream) -> io::Result<Vec<u8>> {
    let (mut all, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match from.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(len) => {
                all.extend_from_slice(&piece[..len]);
                to.write_all(&piece[..len])?;
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    Ok(all)
}
